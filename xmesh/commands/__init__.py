"""The subcommands of ``xmesh``, a module each: ``add_arguments(parser)`` and ``run(args)``."""
