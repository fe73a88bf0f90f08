"""The only package that imports SGLang: one module per seam."""
