"""Several processes for a command: accelerate's launcher starts the same command in each."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass

from ..training_settings import setting


@dataclass
class ProcessArguments:
    """How many processes train together. By default this one alone, or those of the launcher that started it."""

    num_processes: int | None = setting("Processes that train together, on a GPU each or on CPUs.", default=None)
    accelerate_config: str | None = setting(
        "What shares out the training over them (DDP): a configuration file of accelerate, such as those in "
        "accelerate_configs/ of the repository.",
        default=None,
    )

    def __post_init__(self):
        if self.num_processes is not None and self.num_processes < 1:
            raise ValueError(f"`num_processes` is {self.num_processes}: it must be at least 1.")


def is_launched() -> bool:
    """Whether this process is one of several that a launcher has started."""
    return "RANK" in os.environ


@contextmanager
def only_first_prints() -> Iterator[None]:
    """While the context is open, of several processes the first one alone prints to standard output."""
    if os.environ.get("RANK", "0") == "0":
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield


def launch(processes: ProcessArguments, command: Sequence[str]) -> int:
    """
    Runs a command line of `blockdraft` in several processes, and returns its exit code.

    A file that says MULTI_CPU means as many processes on CPUs: accelerate starts one process of it, unless there is
    MPI, and would say nothing. Raises a `ValueError` for a file that is not one of accelerate.
    """
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command, launch_command_parser
    from accelerate.utils import DistributedType
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    argv, kind = [], None
    if processes.accelerate_config is not None:
        try:
            kind = load_config_from_file(processes.accelerate_config).distributed_type
        except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"`accelerate_config`: {processes.accelerate_config} is no configuration of accelerate ({error})."
            ) from error
        argv += ["--config_file", processes.accelerate_config]
    if processes.num_processes is not None:
        argv += ["--num_processes", str(processes.num_processes)]
    if kind == DistributedType.MULTI_CPU:
        os.environ["ACCELERATE_USE_CPU"] = "true"
    if kind == DistributedType.MULTI_CPU or (kind is None and processes.num_processes > 1):
        argv += ["--multi_gpu"]  # by torchrun, on CPUs where there are no GPUs
    if kind is None:
        argv += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
        argv += ["--main_process_port", "0"]
    settings = launch_command_parser().parse_args([*argv, "--module", "blockdraft", *command])
    try:
        launch_command(settings)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as signal:
        return 128 + signal.sigval
    return 0
