"""How far rollouts may be ahead of training: pure counting, without a clock, a process or a tensor.

    room -> admit -> running --finish--> ready --train--> trained
                        |                  |
                        +------ drop ------+    its prompt is asked again: it makes room for itself

A version is the number of updates that a policy has behind it. A group that is trained in the step after
update v has staleness v minus the version of its oldest sampled token: the time that it stood in the queue
counts. AReaL's rule (Fu et al. 2025, arXiv:2505.24298, section 5.1) bounds it before it arises: no more
groups are begun than k + 1 steps can take, so only what takes longer than others is ever dropped.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class StalenessGate:
    """Counts groups.

    max_staleness: k, 0 or more. groups_per_step: that a step trains. num_steps: of the whole run: what no
    step would train is not begun. version: of the present weights. running: admitted and not finished.
    accepted: finished and not dropped, those trained too.
    """

    max_staleness: int
    groups_per_step: int
    num_steps: int
    version: int = 0
    running: int = 0
    accepted: int = 0

    def room(self) -> int:
        """Groups that may be admitted now."""
        steps = min(self.version + self.max_staleness + 1, self.num_steps)
        return max(0, steps * self.groups_per_step - self.running - self.accepted)

    def admit(self, count: int = 1) -> None:
        """ValueError: there is no room for so many."""
        if count > self.room():
            raise ValueError(f"{count} groups, and room for {self.room()}")
        self.running += count

    def finish(self, count: int = 1) -> None:
        """So many groups that ran are ready to be trained."""
        self.running -= count
        self.accepted += count

    def drop_running(self, count: int = 1) -> None:
        """So many that ran are given up."""
        self.running -= count

    def drop_ready(self, count: int = 1) -> None:
        """So many that were ready are not trained: too old, or they teach nothing."""
        self.accepted -= count

    def is_too_old(self, version_first: int) -> bool:
        """Whether what began with these weights may not be trained in the present step."""
        return self.version - version_first > self.max_staleness
