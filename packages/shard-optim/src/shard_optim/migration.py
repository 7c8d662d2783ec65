"""What a program that uses torch's ``ZeroRedundancyOptimizer`` or FSDP changes.

Data for ``bench-harness migrate``, which documents the fields.
"""

from __future__ import annotations

from typing import Any

_MP_POLICY = (
    "compute_dtype is its param_dtype, reduce_dtype keeps its name; outputs keep their dtype"
)
_CLIP = "call model.clip_grad_norm_(max_norm): parameters() are this rank's shards"

RULES: tuple[dict[str, Any], ...] = (
    {
        "names": (
            "torch.distributed.optim.ZeroRedundancyOptimizer",
            "torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer",
        ),
        "instead": "use shard_optim.ShardedOptimizer(params, optimizer_cls, **defaults), made when "
        "the model is on its device",
        "positional": (),
        "arguments": {
            "optimizer_class": "it is called optimizer_cls",
            "parameters_as_bucket_view": "leave it out: parameters are always views of flat "
            "buffers",
            "overlap_with_ddp": "leave out DistributedDataParallel and pass reduce_gradients=True, "
            'overlap="next-forward"',
        },
        "methods": {
            "consolidate_state_dict": "use state = shard_optim.full_state(optimizer=optimizer) on "
            "every rank: the whole state on rank 0, None elsewhere"
        },
        "also": {},
        "texts": {},
        "page": "packages/shard-optim/docs/from-zero-redundancy-optimizer.md",
    },
    {
        "names": (
            "torch.distributed.fsdp.fully_shard",
            "torch.distributed._composable.fsdp.fully_shard",
        ),
        "instead": "leave out the calls for blocks, and wrap the whole model once: model = "
        "shard_optim.FullyShardedDataParallel(model); units=[...] names the blocks if they are "
        "not found",
        "positional": ("module",),
        "arguments": {
            "mesh": "it is called process_group; a two-dimensional mesh replicates over its first "
            "dimension here too",
            "reshard_after_forward": "it is True or False here, for all units",
            "shard_placement_fn": "leave it out: shards are slices of flat buffers",
            "mp_policy": _MP_POLICY,
            "offload_policy": "leave it out: parameters are not offloaded; "
            "OffloadedOptimizer keeps optimizer state in host memory",
            "ignored_params": "leave it out: every parameter is sharded or replicated",
            "dp_mesh_dims": "pass the data-parallel mesh itself as process_group",
        },
        "methods": {
            "set_requires_gradient_sync": "use with model.no_sync():",
            "unshard": "leave it out; model.full_parameters() returns whole parameters",
            "reshard": "leave it out: units are freed by themselves",
            "set_modules_to_forward_prefetch": "pass prefetch=1 or 2",
            "set_modules_to_backward_prefetch": "pass prefetch=1 or 2",
            "set_reshard_after_backward": "leave it out",
            "set_is_last_backward": "leave it out",
        },
        "also": {
            "torch.nn.utils.clip_grad_norm_": _CLIP,
            "torch.distributed.fsdp.MixedPrecisionPolicy": _MP_POLICY,
            "torch.distributed.checkpoint.state_dict.get_model_state_dict": "use "
            "shard_optim.full_state(model), or shard_optim.save(folder, model, optimizer)",
            "torch.distributed.checkpoint.state_dict.set_model_state_dict": "use "
            "shard_optim.load_full_state(state, model), or shard_optim.load(folder, model, "
            "optimizer)",
            "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict": "use "
            "shard_optim.save(folder, model, optimizer)",
            "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict": "use "
            "shard_optim.load(folder, model, optimizer)",
        },
        "texts": {},
        "page": "packages/shard-optim/docs/from-fsdp2.md",
    },
)
