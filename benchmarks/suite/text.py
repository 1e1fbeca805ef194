"""Text that is made from a seed: sentences of common words, for `workloads.py`.

Nearly every word is one token of a large vocabulary, so a length in tokens is kept to a few
percent.
"""

from __future__ import annotations

from random import Random

COMMON = (
    "the a one two some every other old new small large long short warm cold early late "
    "river mountain city village house garden road bridge forest island market school letter book "
    "story question answer reason number picture window table morning evening summer winter water "
    "stone paper bread music light wind rain horse bird fish ship train teacher doctor farmer "
    "writer child friend mother father sister brother family people group member leader army king "
    "sees finds makes takes gives brings keeps holds sells builds opens closes reads writes sends "
    "leaves meets follows remembers knows shows tells asks answers wants needs likes loves fears "
    "and or but because while before after under over near behind between through without with "
    "often never always again slowly quickly quietly together alone here there now then today"
)
WORDS = COMMON.split()


class Writer:
    """Writes texts; two writers of the same seed write the same."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)

    def words(self, count: int) -> str:
        return " ".join(self.random.choices(WORDS, k=count))

    def sentence(self, words: int = 11) -> str:
        return f"{self.words(words).capitalize()}."

    def text(self, tokens: int) -> str:
        """Sentences of about so many tokens together."""
        sentences = []
        while tokens > 0:
            words = max(2, min(11, tokens - 1))
            sentences.append(self.sentence(words))
            tokens -= words + 1
        return " ".join(sentences)
