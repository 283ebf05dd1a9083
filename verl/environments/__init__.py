"""Environments, which decide what an action of the policy does, what comes back, and what it earns."""

from verl.environments.environment import BaseTextEnv, BaseTextEnvStepOutput, ToolGroup, tool
from verl.environments.registry import deregister, make, register

__all__ = ["BaseTextEnv", "BaseTextEnvStepOutput", "ToolGroup", "deregister", "make", "register", "tool"]
