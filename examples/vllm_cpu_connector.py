"""vLLM's connector that writes hidden states, where there is no GPU: as released (0.32.0) it copies into pinned memory
and asks a CUDA event whether it is there, neither of which a CPU has, and the engine ends at its first request with a
lock and no file. What is read of the model and what is written is vLLM's own."""

from unittest import mock

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector

empty_like = torch.empty_like


def unpinned(tensor: torch.Tensor, pin_memory: bool = False, **kwargs) -> torch.Tensor:
    return empty_like(tensor, **kwargs)


class CPUHiddenStatesConnector(example_hidden_states_connector.ExampleHiddenStatesConnector):
    def _submit_async_write(self, pending) -> None:
        with mock.patch("torch.empty_like", unpinned):
            super()._submit_async_write(pending)
        self._req_copy_events[pending.req_id].query = lambda: True
