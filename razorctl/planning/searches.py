"""The searches of a plan: one for each state of weights and optimizer."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from razorctl import units
from razorctl.config.job import Job
from razorctl.config.keywords import Prefer
from razorctl.config.recipe import Recipe
from razorctl.planning.candidates import Candidate
from razorctl.planning.search import Search
from razorctl.planning.states import State, states


class Searches:
    """The searches of one plan, each made on first use.

    asked: the search for the state of the job itself.
    """

    def __init__(self, job: Job, asked: Search, host_memory: int | None = None) -> None:
        """job: as the user gave it. host_memory: bytes that state may take; None for any number."""
        self.job, self.asked, self.host_memory = job, asked, host_memory
        self._by_state = {asked.state: asked}
        self.reasons: dict[str, list[str]] = {}

    def of(self, state: State) -> Search:
        """The search for a state."""
        if state not in self._by_state:
            job = replace(self.asked.job, **state._asdict())
            self._by_state[state] = self.asked.like(job, self.asked.recipe, chosen=True)
        return self._by_state[state]

    def choose(self, prefer: Prefer) -> tuple[Candidate | None, Search]:
        """The choice of a preference in the first state in which anything fits, with its search."""
        self.reasons[prefer] = reasons = []
        for state in states(self.job, self.asked.job, prefer):
            search = self.of(state)
            why = self.impossible(search)
            if why is not None:
                reasons.append(f"{state.label or 'weights and optimizer as requested'}: {why}")
                continue
            chosen = search.choose(prefer)
            reasons += search.reasons[prefer]
            if chosen is not None:
                return chosen, search
        return None, self.asked

    def possible(self, prefer: Prefer) -> Iterator[Search]:
        """The searches in which a way may fit, the leanest first."""
        for search in self.leanest(prefer):
            if self.impossible(search) is None:
                yield search

    def leanest(self, prefer: Prefer) -> list[Search]:
        """The searches for all states of a preference, by the bytes of weights and state."""
        searches = map(self.of, states(self.job, self.asked.job, prefer))
        return sorted(searches, key=lambda search: search.least)

    def like(self, recipe: Recipe | None, **changes: Any) -> "Searches":
        """Searches on the same card for a changed job."""
        asked = self.asked.like(replace(self.asked.job, **changes), recipe)
        return Searches(replace(self.job, **changes), asked, self.host_memory)

    def impossible(self, search: Search) -> str | None:
        """Why no way fits in a state, if that is known without a trace."""
        over, host = search.least - search.budget, search.state.host_bytes(search.weights)
        if over > 0 and search.shards == 1:
            what = "weights" if search.state.on_host else "weights, gradients and state"
            return f"{what} need {units.size(over, math.ceil)} more than is free."
        if not self.hosts(search):
            return f"the optimizer state needs {units.size(host, math.ceil)} of host memory."
        return None

    def hosts(self, search: Search) -> bool:
        """Whether the host has the memory for the state of a search."""
        most = self.host_memory
        return most is None or search.state.host_bytes(search.weights) <= most

    @property
    def rows(self) -> tuple[Candidate, ...]:
        """The tried ways to show, state by state."""
        return tuple(way for search in self._by_state.values() for way in search.rows)
