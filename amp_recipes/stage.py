"""Names the three uses of a batch."""

from __future__ import annotations

from enum import Enum, auto


class Stage(Enum):
    """The uses of a batch.

    Equal to the stage of the same name of SpeechBrain's `Stage`, so that recipes that compare with it still work.
    """

    TRAIN = auto()
    VALID = auto()
    TEST = auto()

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Enum) and type(other).__name__ == "Stage" and self.name == other.name

    __hash__ = Enum.__hash__  # of the name, so equal ones have one
