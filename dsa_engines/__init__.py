"""What puts the ops of dsa into inference engines: a plugin for each, which is off unless DSA_ENGINE=1.

An engine finds its plugin by an entry point of this distribution. The plugin replaces attributes of the engine's
modules, and only where everything that it needs is there in the form that it was tested with; else it says so in one
line and replaces nothing. docs/reference/engines.md has what is replaced and how to use it.
"""
