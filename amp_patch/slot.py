"""Where the session of this process is kept."""

from __future__ import annotations

from amp_patch.errors import AmpError
from amp_patch.session import Session


class SessionSlot:
    """Where the session of this process is kept."""

    def __init__(self) -> None:
        self.session: Session | None = None

    def open(self) -> Session:
        """The current session, made if there is none."""
        if self.session is None:
            self.session = Session()
        return self.session

    def require(self, caller: str) -> Session:
        """The current session, or AmpError."""
        if self.session is None:
            raise AmpError(f"{caller}: expected an earlier call of amp.initialize, found none")
        return self.session

    def close(self) -> None:
        """Close the current session, if any."""
        session, self.session = self.session, None
        if session is not None:
            session.close()


slot = SessionSlot()
