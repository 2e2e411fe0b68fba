"""numpy, imported when something of it is read first: what is wrong in a scenario is said in half the time.

A module that a scenario's check reads writes `from batchsim.base.later import np` in the place of `import numpy as np`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["np"]

if TYPE_CHECKING:
    import numpy as np
else:

    class _Numpy:
        def __getattr__(self, name: str) -> Any:
            import numpy

            value = getattr(numpy, name)
            setattr(self, name, value)  # so that it is asked for once
            return value

    np = _Numpy()
