from ._backend import TritonBackend as TritonBackend
from ._repository import add_bundle as add_bundle
from ._repository import add_onnx as add_onnx
from ._version import __version__ as __version__

__all__ = ["TritonBackend", "__version__", "add_bundle", "add_onnx"]
