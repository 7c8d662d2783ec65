"""Work on CUDA streams of its own keeps its tensors; these streams only remember their calls."""

from contextlib import nullcontext
from unittest.mock import Mock, call, patch

import pytest
import torch

from ddp_lite import PeerFailureError
from ddp_lite.peer import PeerCopies
from ddp_lite.wire import Chain


@pytest.mark.parametrize("end", ["waited for", "dropped", "run fails"])
def test_tensors_outlive_the_copies(end: str) -> None:
    """Copies that nobody will wait for use them, such as those queued before a failure."""

    def run() -> None:
        if end == "run fails":
            raise PeerFailureError("an earlier exchange")

    shared = Mock(stream=Mock())
    copies = PeerCopies(shared)
    current, tensors = Mock(), [Mock(), Mock()]
    failed = False
    with (
        patch("torch.cuda.current_stream", return_value=current),
        patch("torch.cuda.stream", return_value=nullcontext()),
        patch("torch.cuda.is_current_stream_capturing", return_value=False),
    ):
        try:
            message = copies._start(run, tensors)
            if end == "waited for":
                message.wait()
            del message
        except PeerFailureError:  # pytest.raises would keep the message in a traceback
            failed = True
    assert failed is end.endswith("fails")
    shared.follow.assert_called_once_with(current.record_event.return_value)
    assert current.wait_event.called is (end == "waited for")
    for tensor in tensors:
        expected = [] if end == "waited for" else [call(shared.stream)]
        assert tensor.record_stream.call_args_list == expected


@pytest.mark.parametrize("end", ["waited for", "dropped", "second stage fails"])
def test_tensors_outlive_a_chain(end: str) -> None:
    """As ``wire_dtype`` and hooks use them, on a stream of their own."""

    def second() -> None:
        if end == "second stage fails":
            raise PeerFailureError("a collective")

    stream, current, tensors, first = Mock(), Mock(), [Mock()], Mock()
    with (
        patch("ddp_lite.wire._side_stream", return_value=stream),
        patch("torch.cuda.current_stream", return_value=current),
        patch("torch.cuda.stream", return_value=nullcontext()),
    ):
        try:
            chain = Chain([lambda: first, second], tensors, torch.device("cuda", 0))
            if end == "waited for":
                chain.wait()
            del chain
        except PeerFailureError:
            assert end == "second stage fails"
    stream.wait_stream.assert_called_once_with(current)
    first.wait.assert_called_once_with()
    assert current.wait_event.called is (end == "waited for")
    expected = [] if end == "waited for" else [call(stream)]
    assert tensors[0].record_stream.call_args_list == expected
