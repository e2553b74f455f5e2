"""metrics.jsonl: a line of JSON for each step, complete at the end even if the disk was full."""

import logging
import os
from collections.abc import Iterable
from pathlib import Path

from razorctl.training.rundir import METRICS, whole

log = logging.getLogger(__name__)


class Metrics:
    """Adds lines to the metrics of a run. What cannot be written is written with a later line."""

    def __init__(self, out: Path, lines: Iterable[str] = ()) -> None:
        """Makes the file hold just `lines`, each without its end; raises OSError if it cannot."""
        self.lines = list(lines)
        with whole(out / METRICS) as file:
            file.write_bytes(self.text)
        self._file = (out / METRICS).open("r+b", buffering=0)
        self._size, self._rest = len(self.text), b""

    @property
    def text(self) -> bytes:
        """All lines."""
        return "".join(f"{line}\n" for line in self.lines).encode()

    def add(self, line: str) -> None:
        """Writes a line; if that fails it is kept, and the first failure is warned about."""
        self.lines.append(line)
        lagged, self._rest = bool(self._rest), self._rest + f"{line}\n".encode()
        try:
            self._flush()
        except OSError as error:
            if not lagged:
                log.warning("%s lags behind (%s); training goes on.", METRICS, error.strerror)

    def close(self) -> None:
        """Writes what is not written yet; raises OSError if that cannot be."""
        if not self._file.closed:
            self._flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def _flush(self) -> None:
        """Leaves no part of a line behind that is not followed by the rest."""
        try:
            self._file.seek(self._size)
            done = 0
            while done < len(self._rest):
                done += self._file.write(self._rest[done:])
        except OSError:
            os.truncate(self._file.fileno(), self._size)
            raise
        self._size, self._rest = self._size + len(self._rest), b""
