"""Integrations with other libraries. Each module imports its library; importing this package imports none of them."""
