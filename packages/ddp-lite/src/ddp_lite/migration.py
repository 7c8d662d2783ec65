"""Arguments of torch's ``DistributedDataParallel``, and their replacements here.

Loaded by a wrapper that gets an argument which it does not have.
"""

from __future__ import annotations

from collections.abc import Collection

#: What torch's ``DistributedDataParallel`` calls its arguments, and what to write here instead.
TORCH_ARGUMENTS = {
    "batched_grad_copy": "leave it out: nothing is copied by default; copy=True copies a bucket in "
    "one call",
    "bucket_cap_mb": "bucket_size_mb of BucketedDDP is the most MB in a bucket",
    "bucket_cap_mb_list": "bucket_size_mb of BucketedDDP is the most MB in a bucket, and "
    "last_bucket_size_mb in the one reduced last",
    "broadcast_buffers": "call wrapped.sync_buffers() where buffers must be equal",
    "device_ids": "leave it out: move the module and its inputs to the device yourself",
    "device_mesh": "process_group takes a one-dimensional device mesh too",
    "dim": "leave it out: every rank passes its own share of the batch",
    "find_unused_parameters": 'leave it out: missing_gradients="skip-if-all" (the default) serves '
    "parameters without a gradient",
    "forward_sync_buffers": "call wrapped.sync_buffers() where buffers must be equal",
    "gradient_as_bucket_view": "copy=True of BucketedDDP makes gradients views of flat buckets; "
    "the default averages them where they lie and needs no second copy either",
    "init_sync": "leave it out: rank 0's parameters and buffers always go to all ranks",
    "lazy_bucket_allocation": "leave it out: a bucket is allocated when it is complete, if at all",
    "mixed_precision": "use torch.autocast; wire_dtype of BucketedDDP sends smaller gradients",
    "output_device": "leave it out: outputs stay on the module's device",
    "static_graph": "leave it out: it is never needed",
    **dict.fromkeys(("check_reduction", "delay_all_reduce_named_params"), "leave it out"),
    **dict.fromkeys(("param_to_hook_all_reduce", "skip_all_reduce_unused_params"), "leave it out"),
}


def refuse_arguments(wrapper: type, names: Collection[str]) -> None:
    """Refuses arguments that a wrapper does not have; of torch's, says what to write instead."""
    texts = [
        f"{name} is an argument of torch's DistributedDataParallel ({TORCH_ARGUMENTS[name]})"
        if name in TORCH_ARGUMENTS
        else f"{name} is unknown"
        for name in names
    ]
    raise TypeError(
        f"the arguments of {wrapper.__name__} must be those of its documentation, but got "
        f"{', '.join(names)}: {'; '.join(texts)}"
    )
