"""Names the tags of a YAML, and those of a resolved tree."""

REF, COPY = "!ref", "!copy"
REFERENCES = (REF, COPY)
APPLYREF = "!applyref:"
CALLS = ("!new:", "!name:", "!apply:", APPLYREF, "!module:")
INCLUDE = "!include:"
TUPLE = "!tuple"
PLACEHOLDER = "!PLACEHOLDER"
TAGS = (*REFERENCES, *CALLS, INCLUDE, TUPLE, PLACEHOLDER)

# Of exactly a node and a name: what `!ref <model.weight>` is resolved to, as by HyperPyYAML.
ATTRIBUTE = "!apply:getattr"
