"""Build hook: puts the native libraries into the package; everything else is in pyproject.toml.

A wheel gets libraries for any CPU of its architecture, or for this machine alone with
``DFLASH2_NATIVE=1``. An editable install uses ``dflash2_gguf/lib`` of the checkout, building it
when it is missing or out of date.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

REPO = Path(__file__).resolve().parent
sys.path.insert(0, str(REPO / "cpp_patches"))

import native  # noqa: E402
from upstream import PatchError  # noqa: E402


def _fail(error: PatchError) -> None:
    sys.exit(f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""))


class BuildWithLibraries(build_py):
    """build_py that adds dflash2_gguf/lib."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)  # setuptools would keep deleted files
        super().run()
        try:
            self._build()
        except PatchError as error:
            _fail(error)

    def _build(self) -> None:
        if self.editable_mode:
            native.build_libraries(native.Options())
            return
        options = native.Options(portable=os.environ.get("DFLASH2_NATIVE") != "1")
        folder = REPO / "build" / ("lib-portable" if options.portable else "lib-native")
        native.build_libraries(options, folder)
        shutil.copytree(folder, Path(self.build_lib) / "dflash2_gguf" / "lib")


class PlatformWheel(bdist_wheel):
    """A wheel of one platform and any Python 3: the libraries are loaded through ctypes."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


class PlatformDistribution(Distribution):
    """A distribution with native files, so that it is installed as one."""

    def has_ext_modules(self) -> bool:
        return True


def _build_tools() -> list[str]:
    """The wheels of cmake and ninja where the machine has none."""
    return [name for name in ("cmake>=3.21", "ninja") if not shutil.which(name.partition(">")[0])]


setup(
    cmdclass={"build_py": BuildWithLibraries, "bdist_wheel": PlatformWheel},
    distclass=PlatformDistribution,
    setup_requires=_build_tools(),
    options={"build": {"build_base": "build/setuptools"}},  # build/ is llama.cpp's
)
