"""What pyproject.toml can't say: the library of copies and keys is built where there is a C compiler, and done without where there is none."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            # Not a module: `offloadd.transfer.native` loads it as a plain library, so neither Python's headers nor its version matter to it.
            "offloadd.transfer._moves",
            ["offloadd/transfer/moves.c", "offloadd/transfer/keys.c"],
            extra_compile_args=["-O3", "-std=gnu11", "-fvisibility=hidden"],
            optional=True,
        )
    ]
)
