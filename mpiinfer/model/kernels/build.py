"""Compile the C++ kernels: one shared library for each instruction set, next to this file.

    python -m mpiinfer.model.kernels.build

The package's build runs this too. Promises: imports nothing of mpiinfer and nothing beyond the standard library, so
that it runs before anything is installed; a machine without a compiler is no error, since every kernel has a torch
form that is used instead. Refuses to know what the kernels compute.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent

# Suffix of the library -> compiler options, best first. x86-64-v4 is AVX-512 (with VNNI: Ice Lake, Zen 4 and later),
# x86-64-v3 AVX2 with FMA. Elsewhere the compiler's default is used.
X86_OPTIONS = {
    "v4": ("-march=x86-64-v4", "-mavx512vnni", "-mprefer-vector-width=512"),
    "v3": ("-march=x86-64-v3",),
}
OPTIONS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra")


def instruction_sets() -> dict[str, tuple[str, ...]]:
    """Those that this kind of machine may have."""
    return X86_OPTIONS if platform.machine() in ("x86_64", "AMD64") else {"base": ()}


def compiler() -> str | None:
    """The C++ compiler: $CXX, else the first that is found."""
    named = os.environ.get("CXX", "").split()
    return next((found for name in [*named[:1], "c++", "g++", "clang++"] if (found := shutil.which(name))), None)


def build(folder: Path = HERE) -> list[Path]:
    """Compile `folder`'s sources into it. Returns the libraries; none, with a word on standard error, if that fails."""
    cxx = compiler()
    if cxx is None:
        print("no C++ compiler was found: the slower torch forms of the kernels will be used", file=sys.stderr)
        return []
    sources = sorted(str(source) for source in folder.glob("*.cpp"))

    def one(item: tuple[str, tuple[str, ...]]) -> Path | None:
        suffix, options = item
        library = folder / f"kernels-{suffix}.so"
        unfinished = library.with_suffix(f".{os.getpid()}.tmp")  # a rank may be using the old one
        for threads in (("-fopenmp",), ()):
            argv = [cxx, *OPTIONS, *options, *threads, "-o", str(unfinished), *sources]
            done = subprocess.run(argv, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                unfinished.replace(library)
                return library
        print(f"{cxx} could not compile the {suffix} kernels:\n{done.stderr[-2000:]}", file=sys.stderr)
        return None

    with ThreadPoolExecutor() as pool:
        return [library for library in pool.map(one, instruction_sets().items()) if library is not None]


if __name__ == "__main__":
    print(*build(), sep="\n")
