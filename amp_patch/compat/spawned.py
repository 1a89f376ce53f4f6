"""What a process runs that a script under `python -m amp_patch run` has started.

`multiprocessing` runs the main module of its parent by name in a spawned process, and launchers
start it again with `python -m`. Both find this module in the script's place.
"""

from __future__ import annotations

import sys

from amp_patch.compat.run_settings import published_settings
from amp_patch.compat.script import run_as_main, run_in_worker

if __name__ == "__main__":
    _settings = published_settings()
    run_as_main(_settings, [_settings.target, *sys.argv[1:]], until_exit=True)
elif __name__ == "__mp_main__":
    _found = run_in_worker(published_settings())
    globals().update({name: value for name, value in _found.items() if name != "__spec__"})
