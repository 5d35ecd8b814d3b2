"""clipping"""
