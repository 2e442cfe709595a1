from ._backend_checks import check_backend as check_backend
from ._scenes import Scenes as Scenes
from ._scenes import make_scenes as make_scenes
