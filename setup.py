"""CPU kernels as optional extensions: plain shared libraries with a C ABI, loaded by `gblr.ops.native`.

They include no header of torch or Python: the build needs a C++ compiler and nothing else. Where there is none, or it
fails, the package installs without them; the loader says so at first use. All else is in pyproject.toml.
"""

import copy
import os
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = sorted(str(file) for file in Path("src/gblr/ops").rglob("*.cpp"))
HEADERS = sorted(str(file) for file in Path("src/gblr/ops").rglob("*.h"))
# no -ffast-math: it would make a loaded library flush subnormals for the whole process
COMMON = [
    "-O3",
    "-std=c++17",
    "-Wno-maybe-uninitialized",
    "-fopenmp",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
]
INSTRUCTION_SETS = {
    "avx2": ["-march=x86-64-v3", "-DGBLR_LANES=8"],
    "avx512": ["-march=x86-64-v4", "-mprefer-vector-width=512", "-DGBLR_LANES=16"],
}


class BuildPlainLibrary(build_ext):
    """The extensions are no Python modules: nothing named PyInit_* is there to be exported."""

    def get_export_symbols(self, ext):
        return []

    def finalize_options(self):
        """The instruction sets are built side by side."""
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def build_extension(self, ext):
        """Objects of the instruction sets have the same names: each set gets a folder of its own."""
        own = copy.copy(self)
        own.build_temp = str(Path(self.build_temp) / ext.name)
        super(BuildPlainLibrary, own).build_extension(ext)


setup(
    cmdclass={"build_ext": BuildPlainLibrary},
    ext_modules=[
        Extension(
            f"gblr.ops.native.cpu_{name}",
            SOURCES,
            depends=HEADERS,
            extra_compile_args=[*COMMON, *flags],
            extra_link_args=["-fopenmp"],
            language="c++",
            optional=True,
        )
        for name, flags in INSTRUCTION_SETS.items()
    ],
)
