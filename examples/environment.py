"""An environment of your own. A turn earns a tenth for each time that the row's letter occurs in it, up to 1.

python -m examples.environment         writes letters.parquet; docs/environments.md says how a run takes it
"""

from typing import Any

from verl.environments import BaseTextEnv, BaseTextEnvStepOutput


class LetterEnv(BaseTextEnv):
    """An episode of up to `max_turns` turns, which the loop counts. The reward of a turn is 0 to 1."""

    stop = ("</answer>",)
    runs = "inline"

    def __init__(self, env_config: dict[str, Any] | None = None, extras: dict[str, Any] | None = None):
        super().__init__()
        self.letter = (extras or {})["letter"]  # a column of the row
        self.found = 0

    def step(self, action: str) -> BaseTextEnvStepOutput:
        count = min(action.count(self.letter), 10)
        self.found += count
        reply = [{"role": "user", "content": f"\n\n{self.letter}: {self.found} so far.\n\n"}]
        return {"observations": reply, "reward": count / 10, "done": False, "metadata": {"count": count}}

    def get_metrics(self) -> dict[str, Any]:
        return {"letters": self.found}


if __name__ == "__main__":
    import pyarrow as pa
    import pyarrow.parquet as pq

    asked = [(letter, f"Question: write {letter} often. Round {i}.") for i in range(16) for letter in "aeos"]
    rows = [{"prompt": [{"role": "user", "content": text}], "letter": letter} for letter, text in asked]
    pq.write_table(pa.Table.from_pylist(rows), "letters.parquet")
