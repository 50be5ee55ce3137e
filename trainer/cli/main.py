"""The `blockdraft` command. Each command is a module beside this one, imported when it is called."""

import os
import sys
from importlib import import_module
from traceback import walk_tb

from ... import __version__

COMMANDS = {
    "train": "Train a draft for a frozen target, measure it by real decoding, and save it with its card.",
    "regenerate": "Write the target's own answers to prompts: what a draft should be trained on.",
    "cache-features": "Write the target's states of the rows to disk: training then runs no target.",
    "calibrate": "Fit the temperatures of a draft's confidence head.",
    "evaluate": "Decode held-out prompts with the draft and without it.",
    "doctor": "Find out what lowers a draft's acceptance.",
    "generate": "Answer one prompt.",
    "export": "Write a DSpark draft as the `mtp.*` tensors of a DeepSeek V4.1 checkpoint.",
    "import": "Take the DSpark draft out of a DeepSeek V4.1 checkpoint.",
    "push": "Publish a saved draft on the Hub.",
}
# Libraries that read configurations, weights and data, by the names that users give.
OPENERS = ("transformers", "huggingface_hub", "datasets", "pyarrow", "peft", "safetensors")
HELP, HELP_ALL, VERSION = ("-h", "--help"), ("--help_all", "--help-all"), "--version"


def main(argv: list[str] | None = None) -> int:
    """Runs the command. Returns its exit code: 0, 1 if `doctor` finds a fault, 2 for wrong input, 130 after Ctrl-C
    or another signal to stop, 141 if what reads the output stopped early, as `head` does."""
    try:
        code = _main(argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
        return 141


def _main(argv: list[str] | None) -> int:
    name, *argv = (sys.argv[1:] if argv is None else argv) or [None]
    if name is None or name in HELP:
        print(overview())
        return 2 if name is None else 0
    if name == VERSION:
        print(f"blockdraft {__version__}")
        return 0
    try:
        return call(name, argv) or 0
    except BrokenPipeError:
        raise
    except Exception as error:
        if os.environ.get("BLOCKDRAFT_DEBUG") or not is_wrong_input(error):
            raise
        message = " ".join([str(error), *getattr(error, "__notes__", [])])
        print("error:", " ".join(message.split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print(f"\ninterrupted {interrupt}; the same command resumes from there.", file=sys.stderr)
        return 130


def overview() -> str:
    """What `blockdraft --help` prints."""
    commands = "\n".join(f"  {name:16}{text}" for name, text in COMMANDS.items())
    return f"""usage: blockdraft COMMAND [CONFIG.yaml] [VALUE ...] [--key value ...]

{commands}

Settings come from a YAML file and from the command line, which wins.
`blockdraft COMMAND --help` lists those of a command, `blockdraft --version` prints the version."""


def call(name: str, argv: list[str]) -> int | None:
    """Runs one command on its part of the command line. Raises a `ValueError` if there is no such command, or it does
    not take what it is given."""
    if name not in COMMANDS:
        raise ValueError(f"{name!r} is not a command; choose one of {', '.join(COMMANDS)}")
    command = import_module(f".{name.replace('-', '_')}", __package__)
    everything = not set(HELP_ALL).isdisjoint(argv)
    if everything or not set(HELP).isdisjoint(argv):
        from .help import help_text

        values = " ".join(map(str.upper, command.POSITIONALS))
        usage = " ".join(filter(None, [f"blockdraft {name} [CONFIG.yaml]", values, "[--key value ...]"]))
        print(help_text(usage, command.run.__doc__, command.SETTINGS, everything))
        return 0
    from .launch import ProcessArguments, is_launched, launch, only_first_prints
    from .parser import SettingsParser

    parser = SettingsParser(command.SETTINGS.values(), command.POSITIONALS)
    if ProcessArguments in command.SETTINGS.values() and not is_launched():
        processes = parser.parse_one(ProcessArguments, argv)
        if processes != ProcessArguments():
            return launch(processes, [name, *argv])
    with only_first_prints():
        return command.run(*parser.parse(argv))


def is_wrong_input(error: Exception) -> bool:
    """Whether an error is about what the user gave, so that its message says enough: a `ValueError`, an `OSError`, or
    a configuration's refusal of a value, raised by our own modules or by a library that opens what it is given. Once a
    function of torch has been entered, models are at work: what a library raises then is a fault."""
    from huggingface_hub.errors import StrictDataclassError

    if not isinstance(error, ValueError | OSError | StrictDataclassError):
        return False
    modules = [frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in walk_tb(error.__traceback__)]
    package = __package__.partition(".")[0]
    raised_by = next(module for module in reversed(modules) if module not in sys.stdlib_module_names)
    return raised_by == package or (raised_by in OPENERS and "torch" not in modules)


if __name__ == "__main__":
    sys.exit(import_module(".main", __package__).main())  # under its own name, by which it knows its errors
