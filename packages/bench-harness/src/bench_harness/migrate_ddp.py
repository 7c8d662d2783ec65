"""Rules of ``bench-harness migrate`` for programs that use torch's ``DistributedDataParallel``."""

from __future__ import annotations

from typing import Any

from ddp_lite.migration import TORCH_ARGUMENTS

RULES: tuple[dict[str, Any], ...] = (
    {
        "names": (
            "torch.nn.parallel.DistributedDataParallel",
            "torch.nn.parallel.distributed.DistributedDataParallel",
        ),
        "instead": "use ddp_lite.BucketedDDP(module); move the module to its device before",
        "positional": ("module", "device_ids", "output_device", "dim", "broadcast_buffers"),
        "arguments": TORCH_ARGUMENTS,
        "methods": {
            "register_comm_hook": "pass comm_hook=hook to BucketedDDP; the hook is hook(flat, "
            "bucket), averages, and returns an object with wait()",
            "_set_static_graph": "leave it out: it is never needed",
        },
        "also": {
            "torch.distributed.algorithms.join.Join": "use wrapped.join(shadow_step)",
            "torch.distributed.algorithms.ddp_comm_hooks.default_hooks.bf16_compress_hook": "pass "
            "wire_dtype=torch.bfloat16 to BucketedDDP",
            "torch.distributed.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_hook": "pass "
            "wire_dtype=torch.float16 to BucketedDDP",
            "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook.powerSGD_hook": "pass "
            "comm_hook=PowerSGD(rank) to BucketedDDP, with the class of the repository's "
            "examples/power_sgd.py",
        },
        "texts": {
            "module.": "names in BucketedDDP's state_dict have no prefix; its load_state_dict "
            "reads both kinds"
        },
        "page": "packages/ddp-lite/docs/from-torch-ddp.md",
    },
)
