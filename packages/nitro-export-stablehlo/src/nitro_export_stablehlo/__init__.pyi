from ._backend import StableHLOBackend as StableHLOBackend
from ._io_spec import IOSpec as IOSpec
from ._loader import Bundle as Bundle
from ._loader import load_bundle as load_bundle
from ._verify import check_golden as check_golden
from ._version import __version__ as __version__

__all__ = ["Bundle", "IOSpec", "StableHLOBackend", "__version__", "check_golden", "load_bundle"]
