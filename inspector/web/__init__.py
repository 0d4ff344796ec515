"""The web application: routes, templates, access."""
