"""A fork of this process, which its parent asks for its end, or ends."""

import os
import signal


class Fork:
    """pid: Of the process, which the subclass forks. code: Its exit code, as far as it was asked."""

    pid: int
    code: int | None = None

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        if self.code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code

    def kill(self) -> None:
        """Ends it at once."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
