"""How the inference engine decodes: everything behind the plugin class, imported only once it starts.

``worker`` owns the thread; ``scheduler`` decides who decodes; ``batch`` runs one step of one policy
version over ``rows`` (what is known per request), ``arena`` and ``attention`` (keys and values) and
``sampling``; ``staging`` receives new weights. Invariant: a row never sees keys, values or weights of
another policy version, because every version has a batch and an arena of its own.
"""
