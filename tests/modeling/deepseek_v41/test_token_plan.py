import gc
import weakref

import torch
from deepseek_v41_models import tiny_config, tiny_v41

from blockdraft.modeling.deepseek_v41.token_plan import TokenPlan


def test_a_plan_ends_with_its_forward():
    """Its masks are as large as queries times keys: they do not wait for the garbage collector."""
    gc.disable()
    try:
        plan = TokenPlan(tiny_config(), 5, 0, None, torch.device("cpu"), is_cached=False)
        mask = weakref.ref(plan.window(5))
        assert plan.to("cpu") is plan and plan.to("meta") is plan.to("meta")
        del plan
        assert mask() is None
    finally:
        gc.enable()


def test_forwards_leave_no_tensors_behind():
    """Fifty of them, without the garbage collector, with and without a cache and padding."""
    model, ids, mask = tiny_v41(num_hidden_layers=2), torch.randint(80, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[1, :3] = 0

    def run() -> None:
        with torch.no_grad():
            model(ids, use_cache=False)
            model(ids[:, :4], cache=model(ids, attention_mask=mask, use_cache=True).cache)

    def live() -> int:
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    run()
    gc.collect()
    gc.disable()
    try:
        before = live()
        for _ in range(17):
            run()
        assert live() == before
    finally:
        gc.enable()
