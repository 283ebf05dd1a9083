"""One turn, scored by the row's verifiers or by the reward function."""

from verl.environments.base import BaseTextEnv, BaseTextEnvStepOutput


class SingleTurnEnv(BaseTextEnv):
    """The response is the episode."""

    counts_turns = stateless = True

    def step(self, action: str) -> BaseTextEnvStepOutput:
        return BaseTextEnvStepOutput(observations=[], reward=None, done=True, metadata={})
