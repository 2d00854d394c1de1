"""Check an installed distribution: its commands run, and it has compiled kernels.
usage: python -I check_installed.py

With -I, Python does not import from the checkout, so the installed packages are checked.
"""

import importlib
import os
import subprocess
import sys
from pathlib import Path


def main() -> None:
    import dsa

    installed = Path(dsa.__file__)
    assert "site-packages" in installed.parts, f"dsa is imported from {installed}"
    packed = check_kernels()
    command = str(Path(sys.executable).with_name("dsa"))
    subprocess.run([command, "check"], check=True, cwd="/")
    generate = [command, "generate", "--prompt", "def area(", "--max-tokens", "16", "--temperature", "0"]
    text = subprocess.run(generate, check=True, cwd="/", capture_output=True, text=True).stdout
    assert text.startswith("def area("), text
    print(f"{text}\n{packed} modules with compiled kernels")


def check_kernels() -> int:
    os.environ["DSA_CACHE_DIR"] = ""
    import cutlass.cute as cute

    from dsa.runtime.compile_cache import PACKED
    from dsa.runtime.pack import kernel_modules

    cute.compile = None
    archives = {path.name.partition(".")[0] for path in PACKED.glob("*.tar.xz")}
    assert archives, f"{PACKED} has no archives"
    for name in kernel_modules():
        if name.rpartition(".")[2] in archives:
            compile_function, arguments = importlib.import_module(name).shipped_variants()[0]
            assert callable(compile_function(*arguments))
    return len(archives)


if __name__ == "__main__":
    main()
