"""`python -m megatron_gspo.loop RECIPE`: one trainer rank, as our launcher starts it.

Light, and named so that processes spawned by a rank do not import it, nor Megatron with it.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from megatron_gspo.loop.worker import main

    sys.exit(main())
