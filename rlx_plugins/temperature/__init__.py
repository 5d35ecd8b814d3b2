"""temperature"""
