"""Where other libraries meet this package. Each module imports its library when it is imported itself; the package imports none."""
