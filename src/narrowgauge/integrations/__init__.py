"""What makes the library at home in other frameworks, a module a framework.

Nothing is imported here: `import narrowgauge.integrations.timm` imports timm's part, and timm.
"""
