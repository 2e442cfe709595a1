from ._backend import SavedModelBackend as SavedModelBackend
from ._io_spec import IOSpec as IOSpec
from ._loader import SavedModel as SavedModel
from ._loader import load_saved_model as load_saved_model
from ._version import __version__ as __version__

__all__ = ["IOSpec", "SavedModel", "SavedModelBackend", "__version__", "load_saved_model"]
