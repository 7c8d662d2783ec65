"""Gradients averaged by copies between the GPUs of one host, and when that is worth choosing.

``PeerCopyAverage`` is the comm hook (``hook.py``), ``PeerCopies`` the collectives that it and other
packages use (``copies.py``), ``PeerMemory`` the memory that the GPUs share (``memory.py``).
"""

from ddp_lite.peer.copies import PeerCopies
from ddp_lite.peer.hook import Communication, PeerCopyAverage, choose_communication
from ddp_lite.peer.memory import PeerMemory

__all__ = ["Communication", "PeerCopies", "PeerCopyAverage", "PeerMemory", "choose_communication"]
