"""`python -m vdnn` is `vdnn`.

python -m vdnn doctor
"""

import sys

if __name__ == "__main__":
    sys.argv[0] = "vdnn"  # the name under which vdnn.cli lets signals end it while libraries load
    from vdnn.cli.main import main

    sys.exit(main())
