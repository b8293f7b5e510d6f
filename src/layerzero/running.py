"""Forwards of sharded modules that are under way, and how one that an interrupt unwound is noticed."""

from __future__ import annotations

import sys
import threading
from types import FrameType

from layerzero.unit import Use


class Frame:
    """One forward that asked for parameters.

    Attributes:
        caller: the Python frame that calls a module which is no unit, from outside its unit's forward. What a
            KeyboardInterrupt unwinds runs no forward hooks; a unit's ``__call__`` notices, other modules have none.
        entered: whether `Running` counts it; no longer after an interrupt.
        starts_pass: nothing was entered around it.
        first_node: sequence number of the first autograd node that it may make.
        uses: an entry for each unit that was entered so far.
    """

    __slots__ = ("caller", "entered", "first_node", "starts_pass", "thread", "uses")

    def __init__(self, caller: FrameType | None = None) -> None:
        self.caller = caller
        self.thread = threading.get_ident() if caller is not None else 0
        self.entered = self.starts_pass = False
        self.first_node = sys.maxsize
        self.uses: list[Use | None] = []


class Running:
    """The forwards, and open ``unsharded()`` contexts, of one sharded model.

    Attributes:
        depth: how many are nested.
        outside: frames among them that have a caller.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.outside: list[Frame] = []
        self._frames: list[Frame] = []
        self._num_contexts = 0

    def enter(self, frame: Frame) -> None:
        """A forward starts; `leave` ends it."""
        self.depth += 1
        frame.entered = True
        self._frames.append(frame)
        if frame.caller is not None:
            self.outside.append(frame)

    def leave(self, frame: Frame) -> bool:
        """A forward is over; whether it was still counted."""
        if not frame.entered:
            return False
        frame.entered = False
        self.depth -= 1
        self._frames.remove(frame)
        if frame.caller is not None:
            self.outside.remove(frame)
        return True

    def enter_context(self) -> None:
        """An ``unsharded()`` context opens; `leave_context` ends it."""
        self.depth += 1
        self._num_contexts += 1

    def leave_context(self) -> None:
        """An ``unsharded()`` context closes."""
        self.depth -= 1
        self._num_contexts -= 1

    def abandon(self) -> None:
        """An interrupt unwound all forwards; contexts end by themselves."""
        for frame in self._frames:
            frame.entered, frame.caller = False, None  # hooks may still hold it
        self._frames.clear()
        self.outside.clear()
        self.depth = self._num_contexts

    def were_interrupted(self) -> bool:
        """Whether a call in `outside` was unwound: its Python frame is on no stack any more."""
        here = threading.get_ident()
        stack: set[FrameType] = set()
        python: FrameType | None = sys._getframe()
        while python is not None:
            stack.add(python)
            python = python.f_back
        return any(frame.thread == here and frame.caller not in stack for frame in self.outside)
