"""Our own rollout engine: continuous batching in plain torch, on the policy's own weights."""

from verl.workers.rollout.native.native_engine import NativeEngine

__all__ = ["NativeEngine"]
