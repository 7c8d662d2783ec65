"""The errors of ddp-lite. All are ``RuntimeError``s, so a caller that only wants to stop can catch
that."""

from __future__ import annotations


class SynchronizationError(RuntimeError):
    """Any failure to keep the ranks' models equal."""


class ModelMismatchError(SynchronizationError):
    """The ranks' models or settings differ, or a model is not the one that was wrapped."""


class MissingGradientError(SynchronizationError):
    """A parameter got no gradient on some rank and the policy is ``"error"``."""


class UnfinishedSynchronizationError(SynchronizationError):
    """A forward or backward began although the last backward was never finished."""


class StepMismatchError(SynchronizationError):
    """The ranks are at different points of training, or their weights differ."""


class PeerFailureError(SynchronizationError):
    """A collective failed: a peer died, hangs, or runs something else."""
