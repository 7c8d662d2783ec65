"""Query, key and value as one product of weights that FullyShardedDataParallel has gathered."""

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from basics_model import ModelConfig, TransformerLM
from basics_model.products import Products, joined_products, separate_products
from shard_optim import FullyShardedDataParallel

CONFIG = ModelConfig(vocab_size=32, d_model=128, d_ff=128, num_layers=3, num_heads=2)


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def steps(products: Products, *, reshard: bool) -> tuple[dict[str, Tensor], int]:
    """The parameters after two steps, and how often tensors were put side by side meanwhile."""
    torch.manual_seed(0)
    model = TransformerLM(CONFIG, products=products)
    sharded = FullyShardedDataParallel(model, reshard_after_forward=reshard)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.5)
    with mock.patch.object(torch, "cat", wraps=torch.cat) as copies:
        for _ in range(2):
            token_ids = torch.randint(CONFIG.vocab_size, (2, 16))
            sharded(token_ids, token_ids).backward()
            optimizer.step()
            optimizer.zero_grad()
    return sharded.full_parameters(), copies.call_count


@pytest.mark.parametrize("reshard", [True, False])
def test_gathered_weights_are_multiplied_where_they_lie(reshard: bool) -> None:
    """Also where units take turns in buffers, so that backward reads what was gathered again."""
    joined, copies = steps(joined_products, reshard=reshard)
    separate, others = steps(separate_products, reshard=reshard)
    assert copies == others, "no weight is copied"
    for name, value in separate.items():
        torch.testing.assert_close(joined[name], value, atol=1e-5, rtol=1e-4, msg=name)
