"""`python -m megatron_gspo.loop RECIPE`: one trainer rank, as our launcher starts it.

Light, and named so that processes spawned by a rank do not import it, nor Megatron with it.
"""

from __future__ import annotations

import argparse
import signal
import sys

from megatron_gspo.loop.lifeline import end_with_launcher

if __name__ == "__main__":
    # Until the run listens to signals itself, the first one ends the rank, Ctrl-C without a traceback of the imports.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parser = argparse.ArgumentParser(description="One trainer rank (started by megatron-gspo train)")
    parser.add_argument("recipe")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--launcher", type=int, required=True, help="pipe that closes when the launcher ends")
    arguments = parser.parse_args()
    end_with_launcher(arguments.launcher)

    from megatron_gspo.loop.worker import main

    sys.exit(main(arguments.recipe, arguments.resume))
