"""The environment of one turn, which the row's verifiers or the reward function score."""

from verl.environments.environment import BaseTextEnv, BaseTextEnvStepOutput


class SingleTurnEnv(BaseTextEnv):
    """An episode that is over after one response."""

    counts_turns = stateless = True

    def step(self, action: str) -> BaseTextEnvStepOutput:
        return BaseTextEnvStepOutput(observations=[], reward=None, done=True, metadata={})
