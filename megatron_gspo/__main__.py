"""`python -m megatron_gspo` is `megatron-gspo`."""

import sys

from megatron_gspo.cli import main

sys.exit(main())
