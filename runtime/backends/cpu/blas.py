"""How many threads a matrix product gets: one for a small product, all for a large one.

    threads = BlasThreads()
    threads.use(operations=2e8)

Two OpenBLAS threads wait for each other by spinning. For products of a few milliseconds that gains little, and where
anything else runs on the cores a step becomes many times slower; one thread is steady. The rule looks at sizes alone,
so that results do not depend on what else the machine does.

threadpoolctl from 3.7 on heeds only the first thread that sets OpenBLAS, as long as that one lives. Streams end with
their backend, and then it would be the main thread, which gives the threads back: each call here takes control anew.
"""

from __future__ import annotations

from collections.abc import Callable

from threadpoolctl import ThreadpoolController

SMALL = 1e9
"""Operations of an op up to which one thread computes it: some 20 ms on one small core. LeNet (64) stays below."""


class BlasThreads:
    """The BLAS libraries of this process; what the environment allows them (OPENBLAS_NUM_THREADS) is the most."""

    def __init__(self) -> None:
        self._libraries = [lib for lib in ThreadpoolController().lib_controllers if lib.user_api == "blas"]
        self._most = [lib.num_threads for lib in self._libraries]
        self._single = False

    def use(self, operations: float) -> None:
        """Set the threads for an op of so many operations."""
        single = operations <= SMALL
        if single != self._single:
            self._single = single
            for library, most in zip(self._libraries, self._most, strict=True):
                take_control: Callable[..., None] | None = getattr(library, "clear_controlling_thread", None)
                if take_control is not None:
                    take_control(force=True)
                library.set_num_threads(1 if single else most)

    def restore(self) -> None:
        """As many threads as at first."""
        self.use(float("inf"))
