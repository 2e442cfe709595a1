from ._program import ExportProgram as ExportProgram
from ._program import Golden as Golden
from ._save import export_model as export_model
from ._spec import ExportSpec as ExportSpec
