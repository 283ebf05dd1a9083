"""Environments for tests of the loop and the executors; their module must be importable from a process."""

from __future__ import annotations

import os
import threading
import time

from verl.environments.environment import BaseTextEnv
from verl.utils.errors import CouldNotVerify

closed: list[str] = []  # names of episodes that were closed, in this process


class Counting(BaseTextEnv):
    """Counts to `extras["goal"]`, one action at a time. The row's `mood` makes it fail or hang in a step (or
    in init), which `name` tells apart.
    """

    runs = "inline"

    def __init__(self, env_config=None, extras=None):
        super().__init__()
        self.row = extras or {}
        self.env_config = env_config or {}
        if "stop" in self.row:
            self.stop = self.row["stop"]
        if self.mood == "unmade":
            raise RuntimeError("no such maze")

    @property
    def mood(self):
        return self.row.get("mood", "")

    def step(self, action):
        self.turns += 1
        if self.mood == "breaks" and self.turns == 2:
            raise KeyError("gone")
        if self.mood == "unsure":
            raise CouldNotVerify("the judge is away")
        if self.mood == "hangs":
            time.sleep(30)
        if self.mood == "slow":
            time.sleep(0.05)
        done = self.turns >= self.row.get("goal", 2)
        say = [] if done else [{"role": "user", "content": f"[{self.turns}]"}]
        where = [os.getpid(), threading.current_thread() is threading.main_thread()]
        reward = self.row.get("rewards", [0.5] * 9)[self.turns - 1]
        output = {"observations": say, "reward": reward, "done": done, "metadata": {"where": where}}
        return output | ({"postprocessed_action": "else"} if self.mood == "rewrites" else {})

    def close(self):
        closed.append(self.row.get("name", ""))
        if self.row.get("file"):
            with open(self.row["file"], "a") as file:
                file.write("closed\n")

    def get_metrics(self):
        if self.mood == "no figures":
            return None
        if self.mood == "bad figures":
            raise ValueError("no figures")
        return {"turns_taken": self.turns, "limit": self.max_turns}


class Threaded(Counting):
    runs = "thread"


class Killable(Counting):
    runs = "process"


class Greeting(Counting):
    """Shows another prompt than the row's, and keeps a lock, so that it can't be pickled."""

    stop = ("!",)

    def init(self, prompt):
        self.lock = threading.Lock()
        return [{"role": "user", "content": prompt[0]["content"] + " Hello."}], {}


class Plain:
    """No subclass of anything."""

    def __init__(self, env_config, extras):
        self.word = extras["word"]

    def init(self, prompt):
        return prompt, {}

    def step(self, action):
        return {"observations": [], "reward": float(self.word in action), "done": True}

    def close(self):
        closed.append("plain")


class Odd(Counting):
    """Returns what the loop can't take (`mood`), alone or with its neighbours."""

    def init(self, prompt):
        if self.mood == "alone":
            return prompt
        return (["hello"] if self.mood == "prompt" else prompt), {}

    def step(self, action):
        output = super().step(action)
        if self.mood == "observations":
            output["observations"] = ["text"]
        if self.mood == "spans":
            output |= {"action": "look", "metadata": {"start": 90, "text": "x", "seen": 1}}
        return output

    @classmethod
    def step_many(cls, envs, actions):
        if any(env.mood == "together" for env in envs):
            raise RuntimeError("no batch today")
        return None


class Says(Counting):
    """Hands over the content that its row has."""

    def __init__(self, env_config=None, extras=None):
        super().__init__(env_config, extras)
        self.content = extras["content"]

    def step(self, action):
        output = super().step(action)
        return output | {"observations": [{"role": "user", "content": self.content}]}


class Lettered(Counting):
    stop = "</answer>"


class Unstopped(Counting):
    stop = None


class Chosen(Counting):
    @property
    def stop(self):
        return ("</a>",)


class Elsewhere(Counting):
    runs = "threads"


class Later(Counting):
    """Its step ends in a thread, before the loop looks."""

    runs = "thread"
    ended = threading.Event()

    def step(self, action):
        try:
            return super().step(action)
        finally:
            self.ended.set()
