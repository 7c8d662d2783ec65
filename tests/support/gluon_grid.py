"""Programs of one simulated launch that run at the same time; see gluon_simulator."""

from __future__ import annotations

import threading


class Grid:
    """Programs that run at the same time, each in its thread, and may wait for others' signals."""

    def __init__(self, programs: int) -> None:
        self.signals = 0
        self.addition = threading.Lock()  # additions to memory are atomic
        self._running, self._idle = programs, 0
        self._changed = threading.Condition()

    def signalled(self) -> None:
        """To be called after each signal."""
        with self._changed:
            self.signals += 1
            self._idle = 0
            self._changed.notify_all()

    def ended(self) -> None:
        """To be called when a program has ended, also by an error."""
        with self._changed:
            self._running -= 1
            self._changed.notify_all()

    def wait(self, signals: int) -> bool:
        """Waits for more than so many signals; False if nobody is left to give one."""
        with self._changed:
            if self.signals == signals:
                self._idle += 1
            while self.signals == signals:
                if self._idle >= self._running:
                    self._changed.notify_all()
                    return False
                self._changed.wait()
        return True
