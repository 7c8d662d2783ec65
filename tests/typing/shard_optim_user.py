"""A user's program on every public name of shard-optim, for type checkers."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shard_optim import (
    AdamW,
    CollectiveError,
    FullyShardedDataParallel,
    Partition,
    ShardedGradScaler,
    ShardedOptimizer,
    full_state,
    load,
    load_full_state,
    save,
)


def train(module: nn.Module, group: dist.ProcessGroup, folder: Path) -> None:
    partition: Partition = "flat"
    optimizer = ShardedOptimizer(
        module.named_parameters(),
        torch.optim.AdamW,
        process_group=group,
        partition=partition,
        bucket_size_mb=25.0,
        master_dtype=torch.float32,
        reduce_gradients=True,
        overlap="next-forward",
        offload_state=True,
        lr=1e-3,
        weight_decay=0.1,
    )
    ShardedOptimizer([{"params": list(module.parameters()), "lr": 0.1}], torch.optim.SGD)
    halved = AdamW(module.parameters(), lr=torch.tensor(0.1), weight_decay=0.1)
    halved.step()
    optimizer.attach(module)
    scaler = ShardedGradScaler("cuda", init_scale=2.0**10, growth_interval=100, enabled=True)
    print(scaler.is_enabled())
    try:
        with optimizer.no_sync():
            optimizer.zero_grad()
        optimizer.zero_grad(set_to_none=True)
        norm: Tensor = optimizer.clip_grad_norm_(1.0, norm_type=2.0)
        optimizer.step()
        optimizer.wait()
    except CollectiveError as error:
        print(error)
    else:
        print(norm, optimizer.local_gradients())
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    optimizer.load_state_dict(optimizer.state_dict())
    load_full_state(full_state(module, optimizer), module, optimizer)
    save(folder, optimizer=optimizer)
    load(str(folder), optimizer=optimizer)


def fully_sharded(module: nn.Module, group: dist.ProcessGroup, folder: Path) -> None:
    model = FullyShardedDataParallel(
        module,
        process_group=group,
        units=list(module.children()),
        compute_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        reshard_after_forward=True,
        prefetch=2,
        device="cuda",
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    offloaded = ShardedOptimizer(model.parameters(), torch.optim.AdamW, offload_state=True, lr=0.1)
    offloaded.step()
    offloaded.load_state_dict(offloaded.state_dict())
    matrices = [parameter for name, parameter in model.named_parameters() if "weight" in name]
    muon = ShardedOptimizer(matrices, torch.optim.Muon, partition="whole", lr=0.02)
    muon.step()
    saving = save(folder, model, optimizer, background_group=group)
    if saving is not None:
        saving.result()
    load(str(folder), model)
    load_full_state(full_state(model, optimizer), model, optimizer)
