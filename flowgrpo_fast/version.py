__version__ = "0.1.0"


def installed_versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Those of these distributions that are installed here -> their version."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
