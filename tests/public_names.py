"""The public names, taken from the package: a new name is tested, or a test fails."""

import inspect

import loopkit

PUBLIC = {
    name: value
    for name, value in vars(loopkit).items()
    if not name.startswith("_") and not inspect.ismodule(value)
}
FUNCTIONS = {name: value for name, value in PUBLIC.items() if inspect.isfunction(value)}
